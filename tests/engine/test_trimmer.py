"""When an engine gives memory back by itself: after an idle time, and when the system is short of it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from waiting import wait_until

from paged_backend.config import EngineConfig
from paged_backend.engine.engine import Engine
from paged_backend.engine.trimmer import Trimmer
from paged_backend.sampling_params import SamplingParams
from paged_backend.testing import scripted_core

MIB = 1 << 20


class Situation:
    """A trimmer over a core that has cached ``cached`` blocks of a MiB, a clock that is set, and a system that lacks
    ``missing`` bytes."""

    def __init__(self, cached: int, idle_timeout: float = 100.0, keeps: bool = False) -> None:
        self.core = scripted_core(200, block_size=4)
        if keeps:
            self.core.runner.give_back = lambda blocks: False  # type: ignore[method-assign]
        self.now, self.missing, self.asked = 1000.0, 0, 0
        self.trimmer = Trimmer(self.core, MIB, idle_timeout, self.ask, lambda: self.now)
        pool = self.core.cache.pool
        blocks = pool.allocate(cached)
        table = self.core.cache.open(range(4 * cached))
        table.block_ids.extend(blocks)
        self.core.cache.commit(table, range(4 * cached), 4 * cached)
        self.core.cache.free(table)

    def ask(self) -> int:
        self.asked += 1
        return self.missing

    @property
    def committed(self) -> int:
        return self.core.cache.pool.num_committed


def test_an_idle_engine_gives_everything_back_once_and_is_not_woken_again():
    now = Situation(50)
    assert now.trimmer.patience() is None, "it has not worked yet"
    now.trimmer.after_step()
    assert now.trimmer.patience() == 100
    now.now += 30
    assert now.trimmer.patience() == 70
    now.trimmer.after_step()
    assert now.trimmer.patience() == 100
    now.now += 101
    assert now.trimmer.patience() == 0
    now.trimmer.idle()
    assert now.committed == 0
    assert now.trimmer.patience() is None
    now.trimmer.after_step()
    assert now.trimmer.patience() == 100


def test_without_an_idle_timeout_nothing_is_waited_for():
    now = Situation(50, idle_timeout=0.0)
    now.trimmer.after_step()
    assert now.trimmer.patience() is None
    assert now.committed == 50


def test_a_system_that_is_short_gets_what_it_lacks_and_is_asked_once_a_second():
    now = Situation(100)
    now.trimmer.after_step()
    assert (now.asked, now.committed) == (1, 100)
    now.missing = 20 * MIB + 1
    now.now += 0.9
    now.trimmer.after_step()
    assert (now.asked, now.committed) == (1, 100)
    now.now += 0.2
    now.trimmer.after_step()
    assert (now.asked, now.committed) == (2, 79)
    assert now.core.cache.prefixes.num_cached_blocks == 79, "the coldest went, the rest is found again"
    now.missing = 1 << 50
    now.now += 1
    now.trimmer.after_step()
    assert (now.asked, now.committed) == (3, 0)


def test_an_engine_that_has_little_to_give_does_not_ask():
    now = Situation(31)
    now.missing = 1 << 50
    now.trimmer.after_step()
    assert (now.asked, now.committed) == (0, 31)


def test_a_pool_that_keeps_its_memory_keeps_what_is_cached_in_it():
    now = Situation(100, keeps=True)
    now.missing = 1 << 50
    now.trimmer.after_step()
    assert now.trimmer.patience() is None
    assert now.core.cache.prefixes.num_cached_blocks == 100


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the pool keeps its memory")
def test_an_idle_engine_is_as_after_its_start_and_works_on():
    config = EngineConfig("scripted", kv_cache_idle_timeout=0.05)
    params = SamplingParams(temperature=0, max_tokens=40, detokenize=False)
    with Engine(scripted_core(), None, config, block_bytes=10) as engine:
        first = engine.submit([5, 6, 7], params).result(20)
        wait_until(lambda: engine.stats().kv_committed_bytes == 0)
        assert engine.stats().kv_blocks_cached == 0
        again = engine.submit([5, 6, 7], params).result(20)
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        wait_until(lambda: engine.stats().kv_committed_bytes == 0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the pool keeps its memory")
def test_the_idle_timeout_is_five_minutes_or_what_was_asked():
    assert EngineConfig("x") == EngineConfig("x", kv_cache_idle_timeout=300)
    assert EngineConfig("x", kv_cache_idle_timeout=0).kv_cache_idle_timeout == 0
    for bad in (-1, float("nan"), float("inf"), "5", True):
        with pytest.raises(ValueError, match="kv_cache_idle_timeout must be"):
            EngineConfig("x", kv_cache_idle_timeout=bad)  # type: ignore[arg-type]


def test_where_the_pool_keeps_its_memory_an_idle_timeout_is_refused(monkeypatch):
    assert EngineConfig("x", device="cuda").kv_cache_idle_timeout == 0
    assert EngineConfig("x", device="cuda", kv_cache_idle_timeout=0).kv_cache_idle_timeout == 0
    with pytest.raises(ValueError, match="leave it out"):
        EngineConfig("x", device="cuda", kv_cache_idle_timeout=5)
    monkeypatch.setattr("paged_backend.config.sys", SimpleNamespace(platform="darwin"))
    assert EngineConfig("x").kv_cache_idle_timeout == 0
    with pytest.raises(ValueError, match="on Linux"):
        EngineConfig("x", kv_cache_idle_timeout=5)
