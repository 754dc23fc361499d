"""`python -m normsmith`, which is also how torchrun starts several processes of one run."""

from normsmith.cli import main

if __name__ == "__main__":
    main()
