"""Where the time goes, from first principles, and what would help."""
