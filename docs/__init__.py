"""The documentation: Markdown pages, and `tools`, which render the rest of the site from the code."""
