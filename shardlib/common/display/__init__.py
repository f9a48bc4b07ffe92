"""What values show of themselves in a notebook, a terminal and a report: panels, charts and colours."""
