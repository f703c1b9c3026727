"""The task of configs/smollm2_135m_calculator.yaml: questions with two numbers, to be multiplied or
added.

    python examples/calculations.py

writes the training and the evaluation rows beside the configuration. The evaluation has other
sentences and other pairs of numbers than the training.
"""

import json
import random
from pathlib import Path

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
NUMBERS = range(12, 100)
TRAIN_PRODUCTS = """
What is {} times {}?
Compute the product of {} and {}.
A box holds {} pencils. How many pencils are in {} boxes?
A ticket costs {} dollars. How much do {} tickets cost?
There are {} rows of {} seats. How many seats are there?
A printer prints {} pages a minute. How many pages does it print in {} minutes?
""".strip().splitlines()
TRAIN_SUMS = """
What is {} plus {}?
Compute the sum of {} and {}.
Anna has {} stamps and gets {} more. How many stamps does she have?
A shirt costs {} dollars and a coat {} dollars. How much do both cost?
A class has {} girls and {} boys. How many children are in it?
A farmer has {} cows and {} sheep. How many animals does he have?
""".strip().splitlines()
EVAL_PRODUCTS = """
Multiply {} by {}.
A shelf has {} books. How many books are on {} shelves?
A worker earns {} dollars a day. How much does he earn in {} days?
""".strip().splitlines()
EVAL_SUMS = """
Add {} and {}.
A bus carries {} people, and {} more get on. How many people are on the bus?
Tom read {} pages today and {} pages yesterday. How many pages did he read?
""".strip().splitlines()


def main() -> None:
    rng = random.Random(0)
    pairs = [(left, right) for left in NUMBERS for right in NUMBERS if left <= right]
    # Each pair is drawn once, so no pair of the evaluation is in the training.
    pairs = rng.sample(pairs, 1_056)
    splits = {
        "train": (TRAIN_PRODUCTS, TRAIN_SUMS, pairs[:800]),
        "eval": (EVAL_PRODUCTS, EVAL_SUMS, pairs[800:]),
    }
    for split, (products, sums, pairs_of_split) in splits.items():
        lines = []
        for pair in pairs_of_split:
            left, right = rng.sample(pair, 2)
            if rng.random() < 0.5:
                question = rng.choice(products).format(left, right)
                answer = left * right
            else:
                question = rng.choice(sums).format(left, right)
                answer = left + right
            row = {"question": question, "answer": str(answer)}
            lines.append(json.dumps(row) + "\n")
        (CONFIGS / f"smollm2_135m_calculator_{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
