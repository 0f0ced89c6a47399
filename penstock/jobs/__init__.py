"""Jobs that embed many rows and write each row exactly once, even if runs are interrupted."""
