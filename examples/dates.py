"""The task of configs/smollm2_135m.yaml: find the date in a sentence, and write it as YYYY-MM-DD.

    python examples/dates.py

writes the training and the evaluation rows beside the configuration. The evaluation has other
sentences and other dates than the training, so a model that remembers rows gains nothing.
"""

import json
import random
from datetime import date, timedelta
from pathlib import Path

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
TRAIN_SENTENCES = """
The lease ends on {}.
She was born on {}.
Your parcel will arrive on {}.
We met in Lisbon on {}.
Invoice dated {}, due in 30 days.
The bridge was opened on {}.
Please pay before {}.
The meeting of {} was cancelled.
On {}, the museum closed.
He has worked here since {}.
Tickets for {} are sold out.
The warranty is valid until {}.
They were married on {} in Rome.
Last updated: {}
The exam takes place on {} at noon.
A letter of {} was found.
My passport expires on {}.
The shop reopens on {}.
Date of birth: {}
In the evening of {} it began to snow.
The contract, signed on {}, was never printed.
From {} on, all visitors need a badge.
Has the train of {} arrived?
{}: the river rose again.
""".strip().splitlines()
EVAL_SENTENCES = """
The concert was moved to {}.
Our flight leaves on {} from gate 4.
The patient was seen on {}.
Payment received {}, thank you.
By {}, two hundred people had signed.
Departure: {}
The court decided on {} that the claim was valid.
Until {} the library stays closed.
This photo was taken on {} near the harbour.
Is the room free on {}?
""".strip().splitlines()


def ordinal(n: int) -> str:
    """Return ``1st``, ``2nd``, ``3rd``, ``4th``, ..."""
    if n in (11, 12, 13):
        return f"{n}th"
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


def notations(day: date) -> list[str]:
    """Return the date as people write it, in eight ways."""
    month = day.strftime("%B")
    short = day.strftime("%b")
    weekday = day.strftime("%A")
    return [
        f"{month} {day.day}, {day.year}",
        f"{day.day} {month} {day.year}",
        f"{short} {day.day}, {day.year}",
        f"{day.day} {short} {day.year}",
        f"{ordinal(day.day)} of {month} {day.year}",
        f"{month} {ordinal(day.day)}, {day.year}",
        f"{weekday}, {month} {day.day}, {day.year}",
        f"{day.day}. {month} {day.year}",
    ]


def main() -> None:
    rng = random.Random(0)
    first = date(1950, 1, 1)
    # Different dates between 1950 and 2029, each used once.
    days = [first + timedelta(days=n) for n in rng.sample(range(29_219), 1_456)]
    splits = {"train": (TRAIN_SENTENCES, days[:1_200]), "eval": (EVAL_SENTENCES, days[1_200:])}
    for split, (sentences, days_of_split) in splits.items():
        lines = []
        for day in days_of_split:
            sentence = rng.choice(sentences).format(rng.choice(notations(day)))
            row = {"sentence": sentence, "answer": day.isoformat()}
            lines.append(json.dumps(row) + "\n")
        (CONFIGS / f"smollm2_135m_{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
