"""``python -m paged_backend``: the command line."""

from paged_backend.cli import main

main()
