"""The documentation: Markdown pages, and in `tools` what renders the rest of the site from the code."""
