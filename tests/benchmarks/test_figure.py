"""The picture of the README shows what docs/benchmarks.md says."""

from __future__ import annotations

import pytest

from benchmarks.figure import PICTURE, TABLE, draw, read_table
from paged_backend.errors import PagedBackendError


def test_the_picture_has_every_row_of_the_table_and_is_what_the_command_draws(tmp_path):
    pytest.importorskip("matplotlib")
    bars = read_table(TABLE.read_text(encoding="utf-8"))
    assert {bar.ours for bar in bars} == {True, False}
    for bar in bars:
        assert bar.least <= bar.median <= bar.most
    shown = PICTURE.read_text(encoding="utf-8")
    drawn = tmp_path / "again.svg"
    draw(bars, drawn)
    for picture in (shown, drawn.read_text(encoding="utf-8")):
        for bar in bars:
            assert f">{bar.engine}</text>" in picture
            assert f">{bar.median}</text>" in picture
        assert picture.count("</text>") == 2 * len(bars) + 1  # and the title


def test_a_page_without_the_table_is_named():
    with pytest.raises(PagedBackendError, match="no table"):
        read_table("### Throughput\n\nnothing\n\n### Other\n\n| ours | 3 (1 to 4) | 5 |\n")
