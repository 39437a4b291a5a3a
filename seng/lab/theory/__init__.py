"""`seng theory`: the paper's theorems, run. A study is a value; each says what it claims, what it measured, and whether it holds."""
