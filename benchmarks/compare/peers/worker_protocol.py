"""What every worker shares: one JSON request on stdin, one JSON result on stdout. Standard library only.

A worker is run as a plain script by the interpreter of the system it measures, so nothing here may import
``paged_backend``; it must run on any Python that a peer needs. Request:

    cores, threads    the worker pins itself before the peer is imported, so that thread pools have the right size
    model, options    what to load, and the peer's own settings
    max_len, max_seqs longest prompt + output, most requests at once
    prefix_cache      whether the peer may reuse computed prefixes
    one_by_one        each request waits for the one before
    stream            whether the time of every token is wanted
    warmup, requests  lists of {"prompt": token ids, "output": length, "after": 0}; a request with ``after`` = k enters
                      when each of those with ``after`` = 0 has k tokens

Result: ``ok``, ``load_s``, ``wall_s``, ``cpu_s``, ``peak_rss_mb``, ``loaded_rss_mb``, ``versions`` and, for each
request, ``tokens`` and the ``times`` at which they were known to the caller, in seconds since the requests were handed
over (None where the peer gives nothing before the end). On failure: ``ok`` false and ``error``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback


def serve(load, pin_first=True):
    """Answer the request on stdin. load(request) -> engine with ``run(requests)`` -> list of {"tokens", "times"}.

    ``times`` of an engine are stamps of ``time.perf_counter()``. An engine may have ``close()``. pin_first: go to the
    cores before the peer is loaded; False pins every thread once it is.
    """
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the peer prints must not mix with the answer
    try:
        result = _measure(json.load(sys.stdin), load, pin_first)
    except BaseException as error:
        traceback.print_exc()
        result = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    json.dump(result, answer)
    answer.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some peers wait for threads of theirs, or crash, when the interpreter winds up


def _measure(request, load, pin_first):
    if pin_first:
        _pin(request["cores"])
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(request["threads"])
    started = time.perf_counter()
    engine = load(request)
    _pin(request["cores"])
    load_s = time.perf_counter() - started
    loaded = memory_mb("VmRSS")
    one_by_one = request["one_by_one"]
    if request["warmup"]:
        _run(engine, request["warmup"], one_by_one)
        _pin(request["cores"])  # also the threads that the first work has started
    started, cpu = time.perf_counter(), time.process_time()
    done = _run(engine, request["requests"], one_by_one)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    _check_pinned(request["cores"])
    result = {
        "ok": True,
        "load_s": load_s,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "loaded_rss_mb": loaded,
        "peak_rss_mb": memory_mb("VmHWM"),
        "versions": _versions(engine),
        "requests": done,
    }
    if hasattr(engine, "close"):
        engine.close()
    return result


def _pin(cores):
    """Bind every thread of this process to ``cores``."""
    if cores and hasattr(os, "sched_setaffinity"):
        for thread in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(thread), cores)
            except ProcessLookupError:
                continue  # it has just ended


def _check_pinned(cores):
    """Raise if a thread has left ``cores``: some peers bind their threads themselves."""
    if not cores or not hasattr(os, "sched_getaffinity"):
        return
    for thread in os.listdir("/proc/self/task"):
        try:
            at = os.sched_getaffinity(int(thread))
        except ProcessLookupError:
            continue
        if not at <= set(cores):
            raise RuntimeError(
                f"a thread of the peer ran on cores {sorted(at)}, it was pinned to {sorted(cores)}"
            )


def _run(engine, requests, one_by_one):
    done = []
    for group in [[r] for r in requests] if one_by_one else [requests]:
        started = time.perf_counter()
        for item in engine.run(group):
            times = item.get("times")
            item["times"] = [t - started for t in times] if times is not None else None
            item["tokens"] = [int(t) for t in item["tokens"]]
            done.append(item)
    return done


def _versions(engine):
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in getattr(engine, "packages", ()):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def memory_mb(field):
    """A field of /proc/self/status (VmHWM: peak resident memory) in MB; None where there is no such file."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) / 1000
    except OSError:
        pass
    return None


def only_together(requests, name):
    """Refuse requests that enter later, for peers that cannot take any while others run."""
    if any(r["after"] for r in requests):
        raise RuntimeError(f"{name} takes no request while others run")


def run_steps(engine, requests, on_done=lambda index: None):
    """Drive a peer that is stepped by its caller.

    engine.add(index, prompt, output); engine.step() -> iterable of (index, new tokens). Ends when every request
    has the tokens it asked for.
    """
    tokens: list[list[int]] = [[] for _ in requests]
    times: list[list[float]] = [[] for _ in requests]
    late = [i for i, r in enumerate(requests) if r["after"]]
    first = [i for i, r in enumerate(requests) if not r["after"]]
    open_ = set(range(len(requests)))
    for i in first:
        engine.add(i, requests[i]["prompt"], requests[i]["output"])
    while open_:
        least = min((len(tokens[i]) for i in first), default=0)
        for i in [i for i in late if least >= requests[i]["after"]]:
            late.remove(i)
            engine.add(i, requests[i]["prompt"], requests[i]["output"])
        for i, new in engine.step():
            now = time.perf_counter()
            tokens[i].extend(new)
            times[i].extend([now] * len(new))
            if len(tokens[i]) >= requests[i]["output"] and i in open_:
                open_.remove(i)
                on_done(i)
    return [{"tokens": t, "times": s} for t, s in zip(tokens, times)]
