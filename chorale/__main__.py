"""``python -m chorale``."""

from chorale.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
