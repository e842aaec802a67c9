"""A stand-in for vLLM's process: it answers a prompt with its seed, by weights of a version that it is told.

    python -m tests.support.stand_in_engine DESCRIPTOR < SETTINGS.json     as trainer.reinforcement.vllm_process

A prompt of [0] ends the process without a word where the settings say "dies", [1] is an error of the process's, and [2]
one of the run's. It sleeps for the settings' seconds before each answer.
"""

import json
import os
import sys
import time
from multiprocessing.connection import Connection

from trainer.reinforcement import messages


def main(descriptor: int, settings: dict) -> None:
    connection, version = Connection(descriptor), -1
    messages.send(connection, {"result": None, "version": version})
    while True:
        name, given = connection.recv()
        result = None
        if name == "finish":
            version = given["version"]
        if name == "answer":
            time.sleep(settings.get("seconds", 0))
            if settings.get("dies") and [0] in given["prompts"]:
                os._exit(9)
            for prompt in ([1], [2]):
                if prompt in given["prompts"]:
                    messages.send(connection, {"error": f"prompt {prompt}", "fault": prompt == [2]})
                    sys.exit(1)
            told = zip(given["prompts"], given["seeds"], strict=True)
            result = [(prompt, [([seed], [-0.5], str(os.getpid()), True, None)]) for prompt, seed in told]
        messages.send(connection, {"result": result, "version": version})


if __name__ == "__main__":
    main(int(sys.argv[1]), json.load(sys.stdin))
