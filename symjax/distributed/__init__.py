"""Several processes of one run: how they start, agree, stop and exit."""
