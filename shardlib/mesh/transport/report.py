"""The text of a report on ranks that wait for each other: what each of them does, and who is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardlib.errors import listing
from shardlib.mesh.transport.activity import CollectiveCall, State

# What each rank does; or, of a rank that does not answer, what is known about it.
States = Mapping[int, State | str]


def on_rank(rank: int, states: States, why: str = "") -> str:
    """The report that one rank makes.

    Args:
        rank: the rank, whose own state is known.
        states: what all ranks do.
        why: the transport's words.
    """
    state = states[rank]
    assert isinstance(state, State)
    others = listing(activities(states, leave_out=rank))
    call = state.waits
    if call is None:
        return (
            f"rank {rank} waits in no collective, while other ranks wait{_line('; it runs', state.line)}\n{others}\n"
            "Every rank along an axis must make the same calls."
        )
    missing = _missing(call, states)
    whose = "the ranks" if not missing else "that rank" if len(missing) == 1 else "those ranks"
    return (
        f"{call.what} (size {len(call.members)}) {'failed' if state.failed else 'has not ended'} on rank {rank} "
        f"({call.place}, after {state.seconds:.0f} s): {_who(call, missing, states)}"
        f"{_line('. The program is at', state.line)}\n{others}\nLook at the output of {whose} first; if ranks take "
        f"different branches, make every rank call the same collectives.{why and f' ({why})'}"
    )


def activities(states: States, leave_out: int | None = None) -> list[str]:
    """What each rank does, but for one. Ranks that do the same share an entry."""
    ranks_of: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        if rank != leave_out:
            ranks_of.setdefault(_doing(state, states), []).append(rank)
    return [f"{_ranks(ranks)} {doing if len(ranks) == 1 else _of_several(doing)}" for doing, ranks in ranks_of.items()]


def _doing(state: State | str, states: States) -> str:
    if isinstance(state, str):
        return f"no longer answers: {state}"
    if state.ended:
        return state.ended
    call = state.waits
    if call is not None:
        missing = _missing(call, states)
        return (
            f"waits in {call.what} ({call.place}){f' for {_ranks(missing)}' * bool(missing)}{_line(', at', state.line)}"
        )
    last = ", ".join(f"{call.what} ({call.place})" for call in state.last) or "none"
    return f"waits in no collective (its last: {last}){_line('; it runs', state.line)}"


def _missing(call: CollectiveCall, states: States) -> list[int]:
    """The ranks that have not made a call, as far as is known."""
    known = [member for member in call.members if member in states]
    return [member for member in known if not _made(call, states[member])]


def _made(call: CollectiveCall, state: State | str) -> bool:
    return isinstance(state, State) and not state.ended and any(call.joined_by(last) for last in state.last)


def _who(call: CollectiveCall, missing: Sequence[int], states: States) -> str:
    """Why a call does not end."""
    if not missing:
        return _differences(call, states) or "every rank still answers, and has made this call"
    said: dict[str, list[int]] = {}
    for member in missing:
        state = states[member]
        what = (
            "no longer answers" if isinstance(state, str) else "has ended" if state.ended else "has not made this call"
        )
        said.setdefault(what, []).append(member)
    return "; ".join(
        f"{_ranks(ranks)} {what if len(ranks) == 1 else _of_several(what)}" for what, ranks in said.items()
    )


def _differences(call: CollectiveCall, states: States) -> str:
    """How the members' calls of the same number differ; "" if they are equal."""
    made = {}
    for member in call.members:
        state = states.get(member)
        for last in state.last if isinstance(state, State) else ():
            if call.joined_by(last) and last.number == call.number:
                made[member] = last.what
    if len(set(made.values())) < 2:
        return ""
    return f"the ranks' calls differ: {'; '.join(f'rank {member} calls {what}' for member, what in made.items())}"


def _of_several(doing: str) -> str:
    """What several ranks do: the verb, which comes first, in the plural."""
    for one, several in (("waits", "wait"), ("has ", "have "), ("no longer answers", "no longer answer")):
        doing = several + doing.removeprefix(one) if doing.startswith(one) else doing
    return doing


def _line(lead: str, line: str) -> str:
    """A line of code with what leads to it; nothing without the line."""
    return line and f"{lead}\n{line}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
