"""End of the previous attempt: no attempt begins before all members of the last one have ended.

A member has ended if it reported so, or if it has been silent for so long that it must have stopped itself.
"""

import json
import secrets
from collections.abc import Callable

from tasks.gang.board import STALE, Board, Watch, newest_attempt
from tasks.store import Store

ENDED_BY_ITSELF = STALE + 10  # seconds after its last renewal within which a disconnected member ends in any case


def wait_for_the_last(store: Store, gang: str, say: Callable[[str], None], pause: Callable[[], None]) -> None:
    """Wait until all members that an earlier controller, of any version, has left running have ended."""
    number = newest_attempt(store, gang)
    board = Board(store, gang, number)
    word = board.read("gang.json") if number else None
    if word is None or word.get("closed"):
        return
    word |= {"state": "stop", "reason": "its controller was replaced", "save": False, "by": secrets.token_hex(8)}
    board.write("gang.json", json.dumps(word).encode())
    say(f"waits until attempt {number}, whose controller is gone, has ended")
    watch = Watch()
    watch.look(board.tags())
    while True:
        nodes = [name for name in watch.seen if name.startswith("nodes/")]
        left = [name for name in nodes if not (board.read(name) or {}).get("over")]
        beats = [f"beats/{name[6:-5]}" for name in left]
        if all(watch.age(beat) > ENDED_BY_ITSELF for beat in beats):
            break
        pause()
        watch.look(board.tags())
    word["closed"] = True
    board.write("gang.json", json.dumps(word).encode())
