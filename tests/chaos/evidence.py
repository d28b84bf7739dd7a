"""That a run shows something: enough was answered, little is excused, and the faults struck. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.chaos.faults import FaultRecord
from tests.chaos.load import Outcome, Try
from tests.chaos.plan import Fault

LEAST_ANSWERED = (
    0.9  # of what was asked by clients that waited for the end; they ask another coordinator if theirs fails
)
MOST_STALLED = 0.05  # of the same
LEAST_REACHED = 0.5  # of the plan; faults wait for their role's last one to be over


def too_little(tries: Sequence[Try], planned: Sequence[Fault], records: Sequence[FaultRecord]) -> list[str]:
    """What has to happen in every run and did not."""
    in_the_end = {one.ask: one.outcome for one in tries}
    return [*_answers(Counter(in_the_end.values())), *_faults(planned, records)]


def _answers(counts: Counter[Outcome | None]) -> list[str]:
    num_waited = counts.total() - counts[Outcome.LEFT]
    wrong = []
    if counts[Outcome.ANSWERED] < LEAST_ANSWERED * num_waited or not num_waited:
        wrong.append(f"only {counts[Outcome.ANSWERED]} of {num_waited} requests were answered in the end")
    if counts[Outcome.STALLED] > MOST_STALLED * num_waited:
        wrong.append(f"{counts[Outcome.STALLED]} of {num_waited} requests failed because the machine stood still")
    return wrong


def _faults(planned: Sequence[Fault], records: Sequence[FaultRecord]) -> list[str]:
    wrong = []
    if len(records) < LEAST_REACHED * len(planned):
        wrong.append(f"only {len(records)} of {len(planned)} planned faults were reached")
    reached = {(record.fault.kind, record.fault.victim.role) for record in records}
    struck = {(record.fault.kind, record.fault.victim.role) for record in records if record.struck}
    return wrong + [f"{kind.value} never struck a {role.value}" for kind, role in reached - struck]
