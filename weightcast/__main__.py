"""``python -m weightcast``: the command line without its script, for child processes of the same interpreter."""

from weightcast.cli import main

main()
