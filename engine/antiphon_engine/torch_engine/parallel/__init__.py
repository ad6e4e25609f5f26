"""The torch model on several ranks: each rank runs a smaller model, and a few collectives make them one.

A *stage* is a run of layers; its tensor ranks each hold a slice of every matrix in them. What is cut how stands in
`transformers`' own tensor- and expert-parallel plans; `cuts` turns a plan into the part of each weight file that a
rank reads, `collectives` into the sums between ranks, `groups` carries these and the activations from stage to stage.
"""
