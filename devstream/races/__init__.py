"""Missing waits: the clocks that find them."""
