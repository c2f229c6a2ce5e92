"""What a device holds and when: values that exist in memory, the order of the program, and the peak of both.

`liveness` counts. The other modules say what XLA:GPU does to a program that its equations do not show: which kernels it
fuses (`fusion`), what these compute (`computing`, `absorbing`, `flattened`), anew or once (`recomputing`, `priorities`,
`fusing`, `repeated`), what it copies, pads and adds up in place (`products`, `convolutions`, `accumulation`,
`copied_sums`, `workspaces`), and in which order it runs (`order`, `hiding`, `placing`, `viewing`,
`combining`, `outputs`). `usages` states the same for the search, per choice.
"""
