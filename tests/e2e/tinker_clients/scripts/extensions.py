"""What `mint` has beyond Tinker: reverse KL against a saved reference, and checkpoints put together."""

from __future__ import annotations

import desk
import mint
from desk import ROWS, failure, forward, made, prompt, service, step, trainer_of, types


def kl_data(rows):
    return [
        mint.mint.ReverseKLDatum(
            student_input=prompt(row[:-1]),
            reference_input=prompt(row[:-1]),
            target_tokens=types.TensorData(data=row[1:], dtype="int64", shape=[len(row) - 1]),
            weights=types.TensorData(data=[1.0] * (len(row) - 1), dtype="float32", shape=[len(row) - 1]),
        )
        for row in rows
    ]


def kl(trainer, path, temperature=1.0):
    found = mint.mint.forward_backward_reverse_kl(
        trainer, reference_model_path=path, data=kl_data(ROWS), temperature=temperature
    )
    return {"losses": [float(it.loss.data[0]) for it in found.outputs], "metrics": found.metrics}


def computed(client, path):
    sampler = made(client.create_sampling_client(model_path=path))
    return [sampler.compute_logprobs(prompt(row)).result() for row in ROWS]


def main():
    client = service()
    teacher, student = trainer_of(client), trainer_of(client, seed=9)
    for _ in range(4):
        step(teacher, rate=1e-2)
    reference = teacher.save_weights_for_sampler("teacher").result().path
    own = student.save_weights_for_sampler("own").result().path
    zero = kl(student, own)
    before = kl(student, reference)
    rounds = []
    for _ in range(6):
        rounds.append(sum(kl(student, reference)["losses"]))
        student.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    # the reverse KL counts beside the client's numbers, so what it numbers goes on as before
    step(student)
    pupil = student.save_weights_for_sampler("pupil").result().path

    def combined(paths, coefficients, name):
        return mint.mint.interpolate_checkpoints(
            client, source_paths=paths, coefficients=coefficients, output_path=name
        )

    same = combined([reference, reference], [0.25, 0.75], "same")
    half = combined([reference, pupil], [0.5, 0.5], None)
    none = combined([reference, pupil], [0.0, 0.0], "none")
    desk.tell(
        {
            "zero": zero,
            "before": before,
            "hot": kl(student, reference, 4.0),
            "rounds": rounds,
            "reference": reference,
            "pupil": pupil,
            "same": same.model_dump(),
            "half": half.model_dump(),
            "logprobs": {
                "base": forward(trainer_of(client)),
                "reference": computed(client, reference),
                "pupil": computed(client, pupil),
                "same": computed(client, same.path),
                "half": computed(client, half.path),
                "none": computed(client, none.path),
            },
            "uneven": failure(lambda: combined([reference], [0.5, 0.5], "uneven")),
            "unknown": failure(lambda: kl(student, f"{reference}-not")),
            "after": forward(student),
        }
    )


main()
