"""The program behind ``python -m devstream demo``: a byte-level GPT, trained with and without side streams."""
