"""Measurements that are not shipped with the package; ``python -m benchmarks`` from a clone. See docs/benchmarks.md."""
