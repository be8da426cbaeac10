"""One module a subcommand of ``weightcast``; each defines ``command``."""
