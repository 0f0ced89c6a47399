"""The part of the documentation that is rendered from the code when the site is built."""
