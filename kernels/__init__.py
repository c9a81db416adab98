"""Kernel operations (imported as ``paged_backend.kernels``): numpy reference, C for CPUs.

The folder stands at the repository root, so a process whose ``sys.path`` holds that root could find it under
the top-level name ``kernels``, which transformers takes for the PyPI package of that name. In that
case this module hands the name over to the real package, or stays empty when there is none.
"""

if __name__ == "kernels":
    import importlib.machinery
    import importlib.util
    import os
    import sys

    _here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    _elsewhere = [p for p in sys.path if os.path.abspath(p or ".") != _here]
    _spec = importlib.machinery.PathFinder.find_spec("kernels", _elsewhere)
    if _spec is not None and _spec.loader is not None:
        _real = importlib.util.module_from_spec(_spec)
        sys.modules["kernels"] = _real  # before exec: the package imports its own submodules
        _spec.loader.exec_module(_real)
