"""The best of the index scores, which need not leave a kernel that finds both."""
