"""Where requests keep their state: blocks, tables, groups."""
