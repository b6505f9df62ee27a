"""From a captured graph with streams to a program that is proved before it runs."""
