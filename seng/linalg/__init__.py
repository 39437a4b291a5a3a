"""U as an operator, sketches of it, and small dense algebra."""
