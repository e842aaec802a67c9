"""trainer/patches/kept_routes.py: a dispatcher whose tokens are back keeps no graph."""


def test_dispatchers_forget_the_graph_of_their_weights(unpatched):
    assert unpatched("kept", patched=True) == []


def test_they_keep_it_upstream(unpatched):
    assert {
        "MoEAllGatherTokenDispatcher.local_probs",
        "MoEAlltoAllTokenDispatcher.probs",
        "MoEFlexTokenDispatcher.token_probs",
    } <= {*unpatched("kept", patched=False)}
