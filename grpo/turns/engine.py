"""Play conversations: an engine samples turns of the model, and tools or an environment answer.

:meth:`TurnsEngine.generate` makes a :class:`Conversation` for each completion. A completion is a
row of the rollout, and each row belongs to a worker process. The methods of a conversation run in
the thread of that worker, in this order:

1. ``begin`` resets the environment, which may add text to the prompt.
2. ``reply`` gets each turn that the engine samples. It reads the tool calls in the turn, and sends
   each call to the worker. For a reset/step environment, it sends the whole turn as an action. The
   results become messages. The tokens of the messages follow the turn, and have no loss.
3. ``end`` asks for the environment's reward, and makes the record of the completion.

If a call fails or its worker is killed, the model reads an error message as the result. If a reset,
a step or ``get_reward`` fails, or if the environment is lost with its worker, the completion has no
reward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

from grpo.algorithm.batch import Completion, Group, Problem, ToolCall
from grpo.algorithm.seeding import derive_seed
from grpo.config import Config
from grpo.data import Rows, make_problems
from grpo.data.chat import conversation
from grpo.data.tiny import is_tiny_tokenizer
from grpo.model import Policy
from grpo.rewards.calls import ENVIRONMENT_KEY
from grpo.rollout import Engine, SamplingParams, Stops
from grpo.rollout.interface import ROWS_PER_CALL
from grpo.system import UserError
from grpo.turns.calls import Arguments, Call, parameters_by_tool
from grpo.turns.format import Message, TurnFormat
from grpo.turns.sessions import as_reward, as_text
from grpo.turns.tools import Tools
from grpo.workers import Answer, Request


class Conversation:
    """One completion of a problem, its environment, and its turns so far.

    Args:
        stops: decodes the tokens of a turn to text.
        row: index of the completion in the rollout. It decides the worker and the environment.
        seed_key: ``(seed, purpose, step)``, from which the seeds of the conversation are derived.
    """

    def __init__(
        self,
        tools: Tools,
        turn_format: TurnFormat,
        stops: Stops,
        sampling: SamplingParams,
        problem: Problem,
        row: int,
        seed_key: tuple[int, str, int],
    ):
        self.tools = tools
        self.turn_format = turn_format
        self.stops = stops
        self.problem = problem
        self.row = row
        self.max_length = sampling.max_completion_length
        self.environment = tools.environment

        # The completions of a group share the seed of the reset, so that their environments begin
        # equal. The -1 tells this seed from the seeds of completions, which are numbered from 0.
        self.group_seed = derive_seed(*seed_key, problem.index, -1)
        if tools.environment_makes_prompts:
            # Without a dataset, rows have a column `seed`. The prompt of a chat may lack it.
            self.group_seed = problem.columns.get("seed", self.group_seed)
        self.seed = derive_seed(*seed_key, problem.index, row % sampling.num_generations)
        self.num_seeds = 0

        self.ids: list[int] = []
        """The tokens of all turns of the model, and of the answers to these turns."""
        self.messages: list[Message] = []
        self.unread: list[Message] = []
        """The answers that did not fit into the completion."""
        self.texts: list[str] = []
        """The texts of the model's turns."""
        self.rewards: list[float | None] = []
        """The rewards of the turns that a reset/step environment has answered."""
        self.calls: list[ToolCall] = []
        self.stop_reason = ""
        """The reason why the completion has ended; empty before its end."""
        self.failure = ""
        """The reason why the environment has failed; empty if it works."""

    def begin(self) -> str | None:
        """Reset the environment. Returns the text that the reset adds to the prompt, or None."""
        if self.environment is None:
            return None
        columns = {"prompt": self.problem.prompt} | self.problem.columns
        return self._ask(ENVIRONMENT_KEY, "reset", columns, self.group_seed).value

    def reply(self, turn: Sequence[int]) -> list[int] | None:
        """Return the tokens that follow a turn, or None if the completion ends with the turn.

        The engine calls this method through :data:`grpo.rollout.interface.Replies`.
        """
        calls = self._add_turn(turn)
        # After a failed reset the model still samples one turn, which no environment gets.
        if self.failure:
            return None

        rollout = self.tools.config.rollout
        answers = []
        if self.tools.is_stepped:
            answers = self._step()
        elif not calls:
            self.stop_reason = "stop"
        if len(self.texts) == rollout.max_turns:
            # No turn would read the results of the calls, so the calls are not made.
            self.stop_reason = self.stop_reason or "max_turns"
        if not self.stop_reason:
            answers += [self._call(*call) for call in calls]
        # A step may have failed, and a call may have lost the environment.
        if self.stop_reason or self.failure:
            return None

        if rollout.max_tool_tokens is not None:
            for message in answers:
                content = message["content"]
                message["content"] = self.turn_format.truncate(content, rollout.max_tool_tokens)
        room = self.max_length - len(self.ids)
        answer_ids = self.turn_format.answer(answers, turn[-1], room)
        if answer_ids is None:  # the answer does not fit, and the completion ends here
            self.stop_reason = "length"
            self.unread = answers
            return None
        self.messages += answers
        self.ids += answer_ids
        return answer_ids

    def end(self, completion: Completion) -> Completion:
        """Return the record of a completion that has ended, with the environment's reward."""
        # The engine asks for no reply to a turn that was cut at the maximum length.
        cut_turn = completion.ids[len(self.ids) :]
        if cut_turn:
            self._add_turn(cut_turn)
            self.stop_reason = "length"

        reward = None
        failure = None
        if self.environment:
            if self.environment.has_reward and not self.failure:
                reward = self._environment_reward()
            # An environment that got no action has neither failed nor worked, so it does not count
            # when the run decides whether its environments are broken.
            if self.failure or self.rewards or not self.tools.is_stepped:
                failure = self.failure
        return replace(
            completion,
            text=self.texts[-1],
            finished=self.stop_reason != "length",
            messages=self.messages,
            unread=self.unread,
            stop_reason="failed" if failure else self.stop_reason,
            rewards=self.rewards,
            calls=self.calls,
            environment=self.row if self.environment else None,
            environment_reward=reward,
            environment_failure=failure,
            num_turns=len(self.texts),
        )

    def _environment_reward(self) -> float | None:
        """Return the reward that the environment gives to the completion, or None."""
        if not self.tools.is_stepped:
            return self._ask(ENVIRONMENT_KEY, "get_reward", self._next_seed()).value
        rewards = [reward for reward in self.rewards if reward is not None]
        # A conversation that was cut before its first action has earned 0.
        if self.rewards and not rewards:
            return None
        return as_reward(sum(rewards))

    def _add_turn(self, turn: Sequence[int]) -> list[Call]:
        """Add a turn of the model to the conversation. Returns the calls in it."""
        text = self.stops.text(turn)
        message, calls = self.turn_format.read(text, self.tools.schemas)
        self.ids += turn
        self.messages.append(message)
        self.texts.append(text)
        return calls

    def _step(self) -> list[Message]:
        """Give the last turn to the environment as an action. Returns the observation."""
        answer = self._ask(ENVIRONMENT_KEY, "step", self.texts[-1], self._next_seed())
        if self.failure:
            return []
        observation, reward, is_done = answer.value
        self.rewards.append(reward)
        if is_done:
            self.stop_reason = "environment"
        return [{"role": "user", "content": observation}]

    def _call(self, name: str, arguments: Arguments) -> Message:
        """Call a tool. Returns the message of its result."""
        key = self.tools.key_of_tool.get(name)
        if isinstance(arguments, str):  # an error message, as they cannot be read
            answer = Answer("error", message=arguments)
        elif key is None:
            answer = Answer("error", message=f"Tool {name} not found.")
        else:
            answer = self._ask(key, "call", name, arguments, self._next_seed())
        error = as_text(answer.message)
        # TRL writes errors in the same form.
        content = str({"error": error} if error else answer.value)
        report = answer.error or error
        # A forgotten `return`, bytes, an object that Python prints by its address, or an error that
        # the tool has caught.
        if not error and re.search(r"^(None|b['\"].*)?$| object at 0x|^[\w ]*[Ee]rror: ", content):
            report = f"the result {content!r}"
        self.calls.append(ToolCall(name, error, report))
        return {"role": "tool", "name": name, "content": content}

    def _ask(self, key: str, method: str, *arguments: Any) -> Answer:
        """Call a method of a tool or an environment in the worker (:mod:`grpo.turns.sessions`).

        Returns an answer with a value, or with an error message for the model. If the environment
        fails, ``self.failure`` is set.
        """
        limit_s = self.tools.config.reward.timeout_s
        request = Request(key, method, (self.row, *arguments))
        worker = self.tools.worker_of(self.row)
        (answer,) = worker.ask([request], limit_s)
        if answer.status == "ok":
            return answer

        # An exception may have no text, and an error without a message would look like a result.
        message = answer.message or answer.error
        # After a failed tool call, the conversation goes on, unless the worker is lost and the
        # environment with it.
        is_lost = answer.is_worker_lost or isinstance(answer.value, UserError)
        # The user reads this text, so it names the line where the user's code was called, and what
        # a call was made with, which may be why it hung. The last argument is a seed.
        places = re.findall(r'File ".+", line \d+', answer.trace)
        failed = f"{' '.join([method, *map(repr, arguments[:-1])]):.300}: {answer.error or message}"
        report = ", ".join([failed, *places[:1]])
        # The environments of the other rows of a worker are lost with it, and say by which call.
        if answer.is_worker_lost:
            worker.killed_by = report
        elif is_lost:
            report = f"{report} by {worker.killed_by}"
        if method != "call" or (self.environment and is_lost):
            self.failure = report
        # The model reads a message about the tool that does not mention worker processes, and that
        # is the same if a call is repeated.
        if answer.status != "error":
            message = f"no result within {limit_s:g} seconds, or the tool has died"
        return Answer("error", message=message, error=report)

    def _next_seed(self) -> int:
        # Each call has its own seed. A continued run repeats the seeds.
        self.num_seeds += 1
        return derive_seed(self.seed, "tool", self.num_seeds)


def add_to_prompt(
    group: Sequence[Conversation],
    additions: Sequence[Any],
    policy: Policy,
) -> None:
    """Extend the prompt of a group by the text that the resets of its environments returned.

    If the prompt becomes too long, all conversations of the group fail. Their turns are then
    sampled after the prompt of the dataset.

    Args:
        additions: the result of :meth:`Conversation.begin` for each row of the rollout.

    Raises:
        UserError: if the resets returned different texts, or if there is no prompt at all.
    """
    tools = group[0].tools
    problem = group[0].problem
    prompt = problem.prompt
    data = tools.config.data
    group_additions = [additions[c.row] for c in group if not c.failure]
    if not group_additions:  # all resets have failed
        return
    addition = group_additions[0]
    # The advantages of a group compare completions of the same prompt.
    if any(other != addition for other in group_additions):
        raise UserError(
            "reset() gave the completions of one problem different prompts: draw from "
            "`seed`, an argument that they share, or from the module random"
        )
    if addition is None:
        if not prompt and not data.system_prompt:
            raise UserError("a row has no prompt, and reset() returned none")
        return

    if isinstance(prompt, list):
        *before, last = prompt
        last = last | {"content": last["content"] + addition}
        prompt = [*before, last]
    else:
        prompt += addition
    # The prompt is rendered and checked again, in the same way as prompts of a dataset.
    rows = Rows(f"the reset with {prompt!r:.80}", [prompt], [problem.columns])
    try:
        problem_set = make_problems(rows, data, policy.tokenizer, schemas=tools.schemas)
        (new_problem,) = problem_set.problems
        policy.check_fits_context(len(new_problem.prompt_ids), group[0].max_length)
    except ValueError as error:
        for conversation in group:
            conversation.failure = str(error)
        return
    for conversation in group:
        # Seeds depend on the index of the row in the dataset.
        conversation.problem = replace(new_problem, index=problem.index)


class TurnsEngine:
    """Engine (:class:`grpo.rollout.interface.Engine`) that samples conversations with tools.

    Args:
        engine: samples the turns of the model.
        warn: shows a line to the user. The lines are notes of :meth:`check`, and failures.
        num_ranks: number of ranks that share the prompts of a step.
    """

    def __init__(
        self,
        engine: Engine,
        tools: Tools,
        config: Config,
        warn: Callable[[str], None] = print,
        num_ranks: int = 1,
    ):
        self.engine = engine
        self.tools = tools
        self.warn = warn
        # Tools use no GPU memory and no weights, so these attributes are those of the engine.
        self.policy = engine.policy
        self.uses_collectives = engine.uses_collectives
        self.weights = engine.weights
        self.dry_run = engine.dry_run
        self.turn_format = TurnFormat(
            self.policy.tokenizer,
            self.policy.eos_ids,
            config.tools_format,
            config.data.chat_template_kwargs,
        )
        self.rows_per_call = ROWS_PER_CALL
        if tools.environment:
            # An evaluation then needs no more environments than a training step, and so no more
            # sessions on a server.
            rollout = config.rollout
            num_problems = rollout.prompts_per_step // num_ranks
            self.rows_per_call = num_problems * rollout.num_generations
        self._reported_tools: set[str] = set()
        """Names of the tools about which the user has been warned."""

    def check(self) -> None:
        """Check that the chat template can render the turns of the run, and that the environment
        and the worked examples have no usual mistakes.

        What the user should know goes to ``warn``, for example that the model is told of no tool.

        Raises:
            ValueError: if the template cannot render the turns.
        """
        tools = self.tools
        note = self.turn_format.check(uses_tools=not tools.is_stepped, schemas=tools.schemas)
        messages = conversation("", tools.config.data)
        # The built-in tiny model learned its calls in a warm start, so its template shows no tools.
        is_told = is_tiny_tokenizer(self.policy.tokenizer) or all(
            re.search(rf"\b{name}\b", str(messages)) for name in tools.key_of_tool
        )
        if note and not (tools.schemas and is_told):
            self.warn(note)
        shared = tools.environment and tools.environment.shared_names
        if shared:
            self.warn(
                f"warning: completions share {', '.join(shared)} of the environment's class, file "
                "or __init__: what one changes there, others see, unless self.NAME = .. in reset "
                "makes its own"
            )

        if tools.schemas and tools.config.rollout.max_turns == 1:
            self.warn(
                "warning: with rollout.max_turns=1 no call is made: no turn would read its result"
            )
        # The model would copy from an example a call that is none in this run.
        parameters = parameters_by_tool(tools.schemas)
        for turn, answer in pairwise(messages):
            is_call = parameters and turn["role"] == "assistant" and answer["role"] == "tool"
            # The chat template writes `tool_calls` in the form that it shows the model.
            if is_call and "tool_calls" not in turn:
                _, calls = self.turn_format.read(turn["content"], tools.schemas)
                wrong = [
                    name
                    for name, arguments in calls
                    if name not in parameters or set(arguments) - parameters[name].keys()
                ]
                if wrong or not calls:
                    self.warn(
                        f"warning: data.few_shot has no call of this run in "
                        f"{turn['content']!r:.200}: the tools and their arguments are "
                        f"{ {name: [*arguments] for name, arguments in parameters.items()} }"
                    )

    def close(self) -> None:
        self.tools.close()
        self.engine.close()

    def generate(
        self,
        problems: Sequence[Problem],
        sampling: SamplingParams,
        *,
        seed_key: tuple[int, str, int],
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Group]:
        """Sample groups of conversations for some problems.

        The arguments are those of :meth:`grpo.rollout.interface.Engine.generate`. The environments
        of the completions live until the next call of this method.

        Raises:
            UserError: if the environments of a group begin with different prompts.
        """
        tools = self.tools
        stops = Stops(self.policy, sampling.stop)
        G = sampling.num_generations
        conversations = [
            Conversation(
                tools,
                self.turn_format,
                stops,
                sampling,
                problems[row // G],
                row,
                seed_key,
            )
            for row in range(len(problems) * G)
        ]
        groups = [conversations[p * G : (p + 1) * G] for p in range(len(problems))]

        # Resets of different workers run at the same time. The prompts must be complete before the
        # engine begins.
        futures = [tools.submit(c.row, c.begin) for c in conversations]
        additions = [future.result() for future in futures]
        for group in groups:
            add_to_prompt(group, additions, self.policy)

        # All calls of a row are made in the thread of its worker, one after the other.
        def reply(row: int, turn: Sequence[int]) -> Future:
            return tools.submit(row, conversations[row].reply, turn)

        sampled = self.engine.generate(
            [group[0].problem for group in groups],
            sampling,
            seed_key=seed_key,
            on_tokens=on_tokens,
            replies=reply,
        )
        futures = []
        for sampled_group in sampled:
            for completion in sampled_group.completions:
                row = len(futures)
                futures.append(tools.submit(row, conversations[row].end, completion))
        completions = iter([future.result() for future in futures])
        self._warn_of_failures(conversations)
        return [Group(group.problem, tuple(islice(completions, G))) for group in sampled]

    def _warn_of_failures(self, conversations: Sequence[Conversation]) -> None:
        failures = [c.failure for c in conversations if c.failure]
        if failures:
            self.warn(
                f"warning: the environments of {len(failures)} completions have failed, "
                f"first with {failures[0]}"
            )
        # The warning comes once per run for each tool, since a broken tool fails in each step.
        calls = [call for conversation in conversations for call in conversation.calls]
        unread = [message for conversation in conversations for message in conversation.unread]
        for name in self.tools.key_of_tool:
            called = [call for call in calls if call.name == name]
            failed = [call.report for call in called if call.error]
            empty = [call.report for call in called if call.report and not call.error]
            lengths = [len(m["content"]) for m in unread if m.get("name") == name]
            problem = ""
            # A model makes mistakes, but not in most of its calls, if these are more than a few.
            if len(failed + empty) > len(called) / 2 and (empty or len(failed) > 3):
                problem = (
                    f"of {len(called)} calls of {name!r}, {len(failed)} failed and {len(empty)} "
                    "gave no result (is a `return` missing?) or the text of an error, a mistake of "
                    f"the model or of the tool, first {(failed + empty)[0]:.600}"
                )
            elif lengths:
                problem = (
                    f"{len(lengths)} result(s) of {name!r}, of up to {max(lengths)} characters, "
                    "did not fit, and ended their completions: rollout.max_completion_length is "
                    "the room of all turns and results, in tokens, and rollout.max_tool_tokens "
                    "cuts long results"
                )
            if problem and name not in self._reported_tools:
                self._reported_tools.add(name)
                self.warn(f"warning: {problem}")
