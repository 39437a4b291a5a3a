"""`seng report`: what the runs in a results folder say, as tables, as one page for a browser and as figures for a paper."""
