"""How the demo model ``models/baton-tiny`` is made; the modules in the order of the work.

``corpus`` reads the standard library, ``conversations`` makes chats out of its functions, ``tokenizer`` encodes both,
``batches`` keeps them apart from what is held out and makes training rows, ``training`` holds the network and its
loop, ``evaluation`` measures and samples it, ``card`` writes ``README.md`` and ``loss_curve.svg`` from the run's log.
Its sibling ``models/baton-tiny-tools``: ``tool_conversations`` makes its data up, ``tool_training`` trains and measures
it, from an ``induction`` circuit on. What drafts for it (``models/baton-tiny-eagle3`` and others): ``drafts`` are the
networks, ``draft_training`` trains them, ``draft_engine`` asks the engine for answers and acceptance, ``draft_card``
describes them.
"""
