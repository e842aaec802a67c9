"""Evidence on the end of an attempt, from its members' messages, for tasks/gang/diagnosis/classify.py."""

from conf.schema.run import Run
from tasks.gang.controller_link import Lookout
from tasks.gang.diagnosis.causes import OWN, read
from tasks.gang.diagnosis.classify import Evidence, Failure, Rank, classify
from tasks.gang.messages import End, Member


def of_attempt(run: Run, lookout: Lookout, hosts: dict[int, str], gone: set[int], engine: tuple[str, ...]) -> Failure:
    """The failure of these members, with their hosts in the order of their ranks."""
    nodes = {k: lookout.nodes[k] for k in hosts}
    cause = read(engine)
    known = cause is not None and cause.strength == OWN  # the engine reports why it ended a host
    if not known and any(was_told(node) for node in nodes.values()):
        return preempted(nodes)
    for k, node in nodes.items():
        # A member that no signal has stopped lost its starter, the store or the controller.
        if not known and node.state in ("stopping", "stopped"):
            step = max((sign.step for sign in node.ranks), default=0)
            return Failure("host", f"host: {hosts[k]}: {node.reason}", True, hosts[k], step=step)
    ranks = []
    for place, k in enumerate(hosts):
        order = lookout.order_of_failure(k)
        for trace in nodes[k].failed or nodes[k].ranks:
            code, lines = (trace.code, trace.lines) if isinstance(trace, End) else (None, ())
            place_in_order = order + place / 1e6
            ranks.append(Rank(trace.rank, hosts[k], code, trace.step, lines, place_in_order, trace.silent, trace.state))
    stalled = any(end.stalled for node in nodes.values() for end in node.failed)
    free = {hosts[k]: node.free for k, node in nodes.items() if node.free is not None}
    kernel = {hosts[k]: node.kernel for k, node in nodes.items()}
    kills = {hosts[k]: node.oom_kills for k, node in nodes.items()}
    lost = tuple(hosts[k] for k in sorted(gone & hosts.keys()))
    return classify(Evidence(tuple(ranks), lost, kernel, kills, free, engine, stalled), run)


def was_told(node: Member) -> bool:
    """Whether a signal of its starter ended the member. The whole gang may then save a checkpoint."""
    return node.state == "preempted" or node.told


def preempted(nodes: dict[int, Member]) -> Failure:
    host = next((node.host for node in nodes.values() if was_told(node)), "")
    step = max((sign.step for node in nodes.values() for sign in node.ranks), default=0)
    return Failure("preempted", f"preempted: {host or 'a host'} was ended by a signal", True, host, step=step)


def host_names(lookout: Lookout) -> dict[int, str]:
    """Name of each member's host; its address or its member number if the name is not unique."""
    nodes = dict(sorted(lookout.nodes.items()))
    names = [node.host for node in nodes.values()]
    shown = {k: node.host if names.count(node.host) == 1 else node.address for k, node in nodes.items()}
    unique = len({*shown.values()}) == len(shown)
    return shown if unique else {k: f"{nodes[k].host}/{k}" for k in nodes}
