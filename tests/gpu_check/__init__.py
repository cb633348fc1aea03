"""`make gpu-check`: one run that proves the CUDA side on a machine that has a GPU, and can be rehearsed on one without.

    python -m tests.gpu_check [--dry] [--out FILE] [--stages a,b] [--seconds 480]

It needs this repository and a Python with torch, Triton and transformers; nothing is installed or downloaded, models
are random. Stages run one after the other, those of most value first, each in processes of its own with a time limit:
what hangs or crashes is one stage's loss, and what it found before that is kept.

    __main__  driver  report      options, processes and the budget; the JSON document; the table. No torch.
    stage  context                a stage's process: where findings go, what time is left
    machine                       versions, bandwidth, arithmetic
    kernels                       every operator against plain answers
    engine                        token ids against transformers, in every mode of the engine
    decode_kernel                 bytes a second of decode attention
    workload                      W1 and W5 on random models of real shapes, beside the bound
    hf_cb                         transformers' continuous batching on the same rows
    memory                        a step that does not fit

`--dry` runs the same code on CPU with tiny sizes and Triton's interpreter; its figures mean nothing.
"""
