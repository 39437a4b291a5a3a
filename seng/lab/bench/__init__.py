"""`seng bench`: what a step costs beside its rivals, and how near its direction is to the exact one."""
