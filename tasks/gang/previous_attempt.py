"""End of the previous attempt: no attempt begins before all members of the last one are over.

They have said so, or must have ended themselves.
"""

import json
import secrets
from collections.abc import Callable

from tasks.gang.board import STALE, Board, Watch, newest_attempt
from tasks.store import Store

ENDED_BY_ITSELF = STALE + 10  # seconds after its last renewal in which a member that is cut off ends, whatever happens


def wait_for_the_last(store: Store, gang: str, say: Callable[[str], None], pause: Callable[[], None]) -> None:
    """Wait until everything that an earlier controller, of this version or another, has left behind is over."""
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
