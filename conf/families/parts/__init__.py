"""Types and building blocks that the files of conf/families/ share."""
