"""Render the parts of the documentation that come from the code when the site is built."""
