"""From directions to new weights."""
