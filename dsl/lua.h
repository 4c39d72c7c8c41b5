#pragma once
// Lua, in the names that the system's library for C++ has (cmake/Dependencies.cmake finds out which).

#ifdef CAIRN_LUA_CXX_NAMES
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#else
#include <lua.hpp>
#endif
