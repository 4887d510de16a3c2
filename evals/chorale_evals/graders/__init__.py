"""Graders: functions that compare the text of an answer with a target.

``table.GRADERS`` has those of ``file:`` tasks. Each module has ``grade(text, target) -> Verdict``
(``unit_test`` has an asynchronous one). A grader never raises because of what the model wrote, and its time
is bounded.
"""
