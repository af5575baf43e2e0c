"""`python -m vivavoce.cli`."""

from vivavoce.cli import main

main()
