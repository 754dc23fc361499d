"""Turn the results of a study into one self-contained HTML page or a Markdown table."""

from normsmith.report.page import write_report
from normsmith.report.results import Arm, DecodeRow, Point, Results
from normsmith.report.table import markdown_table

__all__ = ["Arm", "DecodeRow", "Point", "Results", "markdown_table", "write_report"]
