"""``python -m paged_backend``: the command line."""

from paged_backend.cli.app import main

main()
