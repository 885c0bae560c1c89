"""`python -m twofour`: the same as the `twofour` command."""

from twofour.cli import main

main()
