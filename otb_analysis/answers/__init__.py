"""What runs say: every answer once, as frozen records, decided here and only rendered elsewhere.

`RunAnswers(store)` holds what one run says. `designs` pools runs that can be compared. Terminal, pages, HTML, Markdown,
JSON, LaTeX and CSV are made from these records and compute nothing.
"""

from otb_analysis.answers.measured import MeasuredSteps
from otb_analysis.answers.run import RunAnswers
from otb_analysis.answers.runs import by_name, compare, designs, opened, reportable, triaged

__all__ = ["MeasuredSteps", "RunAnswers", "by_name", "compare", "designs", "opened", "reportable", "triaged"]
