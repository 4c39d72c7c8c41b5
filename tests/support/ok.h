#pragma once
// A Status or a Result that must be ok: its message is what the test says when it is not. The argument is evaluated
// more than once, so it is a variable.

#include <doctest/doctest.h>

#define REQUIRE_OK(outcome) REQUIRE_MESSAGE((outcome).ok(), ((outcome).ok() ? "" : (outcome).error().message))
#define CHECK_OK(outcome) CHECK_MESSAGE((outcome).ok(), ((outcome).ok() ? "" : (outcome).error().message))
