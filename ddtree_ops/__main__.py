"""``python -m ddtree_ops``: the same as the ``ddtree-ops`` command."""

from ddtree_ops.cli.app import main

if __name__ == "__main__":
    main()
