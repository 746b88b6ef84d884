"""The cache: formats of rows, pages and the page table, and pages over several devices."""
