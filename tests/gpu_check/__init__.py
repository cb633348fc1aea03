"""`make gpu-check`: one run that proves the CUDA side on a machine that has a GPU, and can be rehearsed on one without.

    python -m tests.gpu_check [--dry] [--out FILE] [--stages a,b] [--seconds 480]

It needs this repository and a Python with torch, Triton and transformers; nothing is installed or downloaded, models
are random. Stages run one after the other, those of most value first, each in processes of its own with a time limit:
what hangs or crashes is one stage's loss, and what it found before that is kept.

    __main__  stages  driver  report    options; order and limits; processes and the budget; the table. No torch.
    stage  context                      a stage's process: where findings go, what time is left
    machine                             versions, bandwidth, arithmetic
    kernels  kernel_checks  slot_checks every operator against plain answers
    engine                              token ids against transformers, in every mode of the engine
    decode_kernel                       bytes a second of decode attention
    workload                            W1 and W5 on random models of real shapes, beside the bound, and a trace
    hf_cb                               transformers' continuous batching on the same rows
    memory                              a step that does not fit
    candidates  models  modes  clock    what stages share: operators, models, ways to run the engine, time

`--dry` runs the same code on CPU with tiny sizes and Triton's interpreter; its figures mean nothing.
"""
