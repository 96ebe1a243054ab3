// What Python's collector is about to make old.
//
// A callback of `gc.callbacks` that is no function of Python's: no signal's handler, no other thread and no tracer gets in between,
// and nothing can be raised there, which the collector would swallow. It needs no header of Python: all it calls is of the stable ABI.
#include "rows.h"
#include <dlfcn.h>

namespace torchmem {
namespace {

struct Object { int64_t references; void* type; };
struct Method { const char* name; Object* (*function)(Object*, Object*); int flags; const char* doc; };

// The functions of Python that are called; all are there, or none is used.
struct Api {
  Object* (*new_function)(Method*, Object*, Object*);
  Object* (*self_of)(Object*);
  Object* (*tuple_item)(Object*, ssize_t);
  ssize_t (*tuple_size)(Object*);
  Object* (*list_item)(Object*, ssize_t);
  ssize_t (*list_size)(Object*);
  int (*list_append)(Object*, Object*);
  Object* (*dict_item)(Object*, const char*);
  Object* (*call)(Object*, ...);
  Object* (*number)(long);
  long (*long_of)(Object*);
  int (*compare)(Object*, const char*);
  int (*is_subtype)(void*, void*);
  void (*drop)(Object*);
  void (*keep)(Object*);
  void (*clear)();
  void* (*interpreter)();
  void* (*first_thread)(void*);
  void* (*next_thread)(void*);
  void* function_type;
  Object* none;
} py;

// Where nobody looks for long, references to what is dead must not fill the memory.
constexpr ssize_t MOST_KNOWN = 200000;

bool found() {
  static const bool all = [] {
    bool ok = true;
    auto find = [&](auto& into, const char* name) {
      into = reinterpret_cast<std::remove_reference_t<decltype(into)>>(dlsym(RTLD_DEFAULT, name));
      ok &= into != nullptr;
    };
    find(py.new_function, "PyCFunction_NewEx"), find(py.self_of, "PyCFunction_GetSelf");
    find(py.tuple_item, "PyTuple_GetItem"), find(py.tuple_size, "PyTuple_Size");
    find(py.list_item, "PyList_GetItem"), find(py.list_size, "PyList_Size"), find(py.list_append, "PyList_Append");
    find(py.dict_item, "PyDict_GetItemString"), find(py.call, "PyObject_CallFunctionObjArgs");
    find(py.number, "PyLong_FromLong"), find(py.long_of, "PyLong_AsLong"), find(py.compare, "PyUnicode_CompareWithASCIIString");
    find(py.is_subtype, "PyType_IsSubtype"), find(py.drop, "Py_DecRef"), find(py.keep, "Py_IncRef"), find(py.clear, "PyErr_Clear");
    find(py.interpreter, "PyInterpreterState_Get"), find(py.first_thread, "PyInterpreterState_ThreadHead");
    find(py.next_thread, "PyThreadState_Next"), find(py.function_type, "PyCFunction_Type"), find(py.none, "_Py_NoneStruct");
    return ok;
  }();
  return all;
}

// Whether nothing of Python can run between this callback and the collection.
bool nothing_comes_between(Object* self, Object* callbacks) {
  void* thread = py.first_thread(py.interpreter());
  if (!thread || !py.next_thread(thread)) return true;
  ssize_t n = py.list_size(callbacks);
  Object* last = n > 0 ? py.list_item(callbacks, n - 1) : nullptr;
  return last && last->type == py.function_type && py.self_of(last) == self;
}

// Appends a reference to each instance of `classes` among the objects of a generation; false where that failed.
bool note(Object* get_objects, Object* reference, Object* classes, Object* known, int generation) {
  Object* number = py.number(generation);
  Object* objects = number ? py.call(get_objects, number, nullptr) : nullptr;
  if (number) py.drop(number);
  if (!objects) return false;
  std::unordered_map<void*, bool> wanted;
  bool ok = true;
  for (ssize_t i = 0, n = py.list_size(objects); i < n; i++) {
    Object* object = py.list_item(objects, i);
    auto [type, is_new] = wanted.try_emplace(object->type, false);
    if (is_new)
      for (ssize_t c = 0; c < py.tuple_size(classes); c++) type->second |= py.is_subtype(object->type, py.tuple_item(classes, c)) != 0;
    if (!type->second) continue;
    Object* made = py.call(reference, object, nullptr);
    ok &= made && py.list_append(known, made) == 0;
    if (made) py.drop(made);
  }
  py.drop(objects);
  return ok;
}

// `self` is (gc.get_objects, weak reference, classes, known, noted, gc.callbacks); `arguments` are those of
// `gc.callbacks`. What is seen whole adds a None to `noted`.
Object* on_collection(Object* self, Object* arguments) {
  Object *phase = py.tuple_item(arguments, 0), *info = py.tuple_item(arguments, 1);
  Object* generation = phase && info ? py.dict_item(info, "generation") : nullptr;
  auto item = [&](int n) { return py.tuple_item(self, n); };
  if (generation && py.long_of(generation) > 0 && py.compare(phase, "start") == 0) {
    bool ok = py.list_size(item(3)) < MOST_KNOWN;
    for (int young = 0; ok && young < 2; young++) ok = note(item(0), item(1), item(2), item(3), young);
    if (ok && nothing_comes_between(self, item(5))) py.list_append(item(4), py.none);
  }
  py.clear();
  py.keep(py.none);
  return py.none;
}

}  // namespace

// Returns a function for `gc.callbacks`, or what it is given where Python lacks anything that is called.
extern "C" __attribute__((visibility("default"))) void* torchmem_collection_callback(void* self) {
  static Method method{"torchmem_on_collection", on_collection, 1, nullptr};  // METH_VARARGS
  if (found()) return py.new_function(&method, static_cast<Object*>(self), nullptr);
  static_cast<Object*>(self)->references++;
  return self;
}

}  // namespace torchmem
